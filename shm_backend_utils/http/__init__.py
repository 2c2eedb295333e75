"""HTTP as both halves need it: answers that have an end, and short questions over connections that are kept."""
