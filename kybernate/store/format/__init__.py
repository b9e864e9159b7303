"""The bytes of a chunk store: chunks, packs, indexes and recipes. Without I/O. docs/store-format.md has every byte."""
