"""What the shim does about GPUs: evidence, pre-flight, the order of the driver's steps, clients of other processes."""
