"""The product as processes: supervisor, engine worker, api, command line. Everything that has a clock, a port or a signal."""
