"""The command line: thin over the registry and ``testing``. ``main`` finds the command; each command is one module."""
