"""The documentation as a site, by MkDocs: mkdocs.yml at the root says what is in it."""
