"""Compile the pretended driver and print the folder that holds it."""

from tests.fakes.cuda.build import build

print(build())
