"""In which order a restore needs the files of an image."""

from __future__ import annotations

from dataclasses import replace

from kybernate.store.format.recipe import Recipe
from kybernate_shim.checkpoint.image.manifest import Manifest, decode
from kybernate_shim.vram_io.image_files import VramFile


def late_files(manifest: Manifest) -> list[str]:
    """Return the names, on the disk, of the files that a restore does not begin with, in the order of its need.

    The arena's are read while CRIU works, those of VRAM wait for CRIU.
    """
    suffix = ".enc" if manifest.encryption else ""
    return [f"{one.file}{suffix}" for one in sorted(manifest.moved_files, key=lambda one: isinstance(one, VramFile))]


def ordered(recipe: Recipe) -> Recipe:
    """Return a recipe whose files come as a restore needs them: CRIU's first. Raises ManifestInvalid."""
    files = {file.name: file for file in recipe.files}
    later = [files[name] for name in late_files(decode(recipe.manifest)) if name in files]
    return replace(recipe, files=(*(file for file in recipe.files if file not in later), *later))
