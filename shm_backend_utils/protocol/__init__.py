"""The wire protocol between a client and a model: names, tables, results, the layout of a region. Pure: no I/O."""
