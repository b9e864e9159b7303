"""How the registry's tables came to be, revision by revision. A release only ever adds to them."""
