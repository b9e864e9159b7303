"""A checkpoint image: manifest, files and digests, encryption and signature, which one is meant and may be restored."""
