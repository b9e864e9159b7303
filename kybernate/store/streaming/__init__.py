"""Images that are restored while they arrive: CRIU's files first, then VRAM, which the restore takes as it comes."""
