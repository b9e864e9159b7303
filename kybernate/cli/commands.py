"""The commands, and which module has each. One module is one command or one group of them, with a `register`."""

from __future__ import annotations

# The module of each command, in the order of the help.
COMMANDS = {
    "checkpoint": "checkpoint",
    "release": "release",
    "restore": "restore",
    "images": "images",
    "inspect": "inspect",
    "import": "importing",
    "export": "export",
    "push": "push",
    "pull": "pull",
    "registry": "registry",
    "store": "store",
    "keys": "keys",
    "encrypt": "encrypt",
    "decrypt": "encrypt",
    "ps": "status",
    "status": "status",
    "suspend": "suspend",
    "resume": "suspend",
    "swap": "swap",
    "wake": "wake",
    "sleep": "wake",
    "park": "wake",
    "ops": "ops",
    "wait": "ops",
    "cancel": "ops",
    "events": "events",
    "top": "top",
    "promote": "tiers",
    "demote": "tiers",
    "prefetch": "tiers",
    "evict": "tiers",
    "label": "catalogue",
    "rm": "catalogue",
    "pin": "tiers",
    "unpin": "tiers",
    "seats": "seats",
    "why": "seat_states",
    "schedule": "schedule",
    "topology": "topology",
    "pool": "pool",
    "cuda": "cuda",
    "context": "context",
    "version": "version",
    "doctor": "doctor",
    "setup": "setup",
    "agent": "agent",
    "up": "up",
    "down": "up",
    "logs": "up",
    "models": "up",
    "restart": "up",
    "page": "page",
    "proxy": "proxy",
}

# The groups of the help. A command that is in none of them is in the last one.
GROUPS = {
    "Containers": (
        *("ps", "status", "checkpoint", "restore", "release", "suspend", "resume"),
        *("swap", "sleep", "park", "wake", "why"),
    ),
    "Images": (
        *("images", "inspect", "label", "pin", "unpin", "rm", "import", "export", "push", "pull", "encrypt", "decrypt"),
    ),
    "Tiers and stores": ("promote", "demote", "prefetch", "evict", "store", "registry"),
    "One machine": ("up", "down", "models", "restart", "logs"),
    "Operations": ("ops", "wait", "cancel", "events", "top"),
    "Node": ("doctor", "setup", "agent", "context", "keys", "pool", "cuda", "topology", "version"),
}

# Those that call the agent, and so have the option --agent.
BY_AGENT = frozenset(
    {
        "cancel", "checkpoint", "demote", "events", "evict", "images", "label", "ops", "park", "pin", "prefetch",
        "promote", "ps", "release", "restore", "resume", "rm", "schedule", "sleep", "status", "suspend", "swap", "top",
        "unpin", "version", "wait", "wake", "why",
    }
)  # fmt: skip

# Those that people and programs wait for: called without typer where their arguments are plain, see declared.py.
PROMPT = ("ps", "status", "suspend", "resume")
