"""The command line: thin commands, each imported only when it is called."""
