"""`kybernate doctor`: what this node can do, and what to do about the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.output import show_columns
from kybernate.node.finding import HealthFinding


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Close what is open to other users; unlock and thaw what a dead shim has left, or end it.",
        ),
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Examine this node: containerd, shim, runtimes, CRIU, kernel, GPUs, agent, tiers, store, registry, Kubernetes.

    Each problem has one remedy. The exit status is 1 if something will fail.
    """
    from kybernate.doctor.examination import examine  # what it loads, no other command needs together

    findings = examine(fix=fix)
    if not show_document([asdict(finding) for finding in findings], output):
        show_columns(
            ("SUBJECT", "VERDICT", "FOUND"),
            [(one.subject, one.verdict, one.found.replace("\n", " / ")) for one in findings],
        )
        if advice := [(one.subject, one.advice) for one in findings if one.advice]:
            typer.echo()
            show_columns(("SUBJECT", "WHAT TO DO"), advice)
        typer.echo(f"\n{_verdict(findings)}")
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


def _verdict(findings: Sequence[HealthFinding]) -> str:
    """Return the worst that was found, in words."""
    bad = [finding.subject for finding in findings if finding.verdict == "bad"]
    notes = sum(finding.verdict == "note" for finding in findings)
    if bad:
        return f"bad: {', '.join(dict.fromkeys(bad))}"
    return f"ok, with {notes} notes" if notes else "ok"
