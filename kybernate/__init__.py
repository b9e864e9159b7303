"""The platform on top of the shim: long-running programs and the command line."""
