"""The command line of eschedule: parsing, printing, and the use case of each command."""
