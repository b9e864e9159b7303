"""Groups of GPUs, the seats on them, and which of the seats are active. A core without input or output."""
