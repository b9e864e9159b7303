"""One module is one revision, and never changes once it was released."""
