"""One module per client: how it is started at a given load, and how its own report is read."""
