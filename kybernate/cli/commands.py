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
    "ops": "ops",
    "wait": "ops",
    "cancel": "ops",
    "events": "events",
    "top": "top",
    "promote": "tiers",
    "demote": "tiers",
    "prefetch": "tiers",
    "evict": "tiers",
    "pin": "tiers",
    "unpin": "tiers",
    "seats": "seats",
    "schedule": "schedule",
    "pool": "pool",
    "cuda": "cuda",
    "context": "context",
    "doctor": "doctor",
    "setup": "setup",
    "agent": "agent",
    "page": "page",
    "proxy": "proxy",
}

# Those that call the agent, and so have the option --agent.
BY_AGENT = frozenset(
    {
        "cancel", "checkpoint", "demote", "events", "evict", "images", "ops", "pin", "prefetch", "promote", "ps",
        "release", "restore", "resume", "sleep", "status", "suspend", "swap", "top", "unpin", "wait", "wake",
    }
)  # fmt: skip

# Those that people and programs wait for: called without typer where their arguments are plain, see declared.py.
PROMPT = ("ps", "status", "suspend", "resume")
