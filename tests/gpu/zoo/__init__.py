"""Programs that use a GPU in the ways that programs do, and what each of them goes through; see README.md above."""
