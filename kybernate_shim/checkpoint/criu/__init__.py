"""CRIU: its configuration and options, what its image files contain, its versions."""
