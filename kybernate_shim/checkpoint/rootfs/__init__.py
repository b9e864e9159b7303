"""The changed files of a container's root filesystem: found, written to an image, applied again."""
