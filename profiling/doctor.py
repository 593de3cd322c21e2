"""The doctor's report: facts, the environment variables that matter, and known combinations among them, with advice.

`diagnose` is a pure function of what it is given; `doctor_read.py` reads, `render/doctor.py` words it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..optim.rocm_env import ExportLine, lines_to_export
from .codec import encode
from .doctor_facts import Facts
from .doctor_rules import RULES, Rule, Severity
from .doctor_variables import UnknownVariable, Variable, find_unknown, read_known

SCHEMA_VERSION = 1
"""Format of the report as JSON."""
_ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A known combination that is there."""

    id: str
    severity: Severity
    title: str
    seen: str | None
    """Figures and values that speak for it; None in a redacted report."""
    advice: str
    reference: str
    """Address of a public page on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the doctor found."""

    facts: Facts
    variables: tuple[Variable, ...]
    """Known environment variables that are set."""
    unknown_variables: tuple[UnknownVariable, ...]
    exports: tuple[ExportLine, ...]
    """Lines to put into the shell that starts the program."""
    findings: tuple[Finding, ...]
    """Errors first, then warnings, then notes."""

    @property
    def has_errors(self) -> bool:
        """True where decodes will fail or come out wrong."""
        return any(f.severity == "error" for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as one JSON-safe object; None is null."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "doctor",
            **encode(self.facts),
            "variables": encode(self.variables),
            "unknown_variables": encode(self.unknown_variables),
            "exports": encode(self.exports),
            "findings": encode(self.findings),
        }

    def redacted(self) -> Report:
        """The report without paths and without values of environment variables, to be shown to others."""
        facts, kitchen = self.facts, self.facts.kitchen
        return replace(
            self,
            facts=replace(
                facts,
                folders=tuple(replace(f, path=None) for f in facts.folders),
                # words of drivers and packages, which may name files
                memory=replace(facts.memory, invalid_readings=()),
                kitchen=replace(
                    kitchen, reason=None, backends=tuple(replace(b, reason=None) for b in kitchen.backends)
                ),
            ),
            variables=tuple(replace(v, value=None, value_meaning=None) for v in self.variables),
            findings=tuple(replace(f, seen=None) for f in self.findings),
        )


def diagnose(facts: Facts, environ: Mapping[str, str], rules: Sequence[Rule] = RULES) -> Report:
    """What these facts and variables mean. Reads nothing else."""
    findings = [_finding(rule, seen) for rule in rules if (seen := rule.check(facts, environ)) is not None]
    return Report(
        facts=facts,
        variables=read_known(environ),
        unknown_variables=find_unknown(environ),
        exports=lines_to_export(environ, facts.versions.hip, facts.versions.system),
        findings=tuple(sorted(findings, key=lambda f: _ORDER.index(f.severity))),
    )


def _finding(rule: Rule, seen: str) -> Finding:
    return Finding(
        id=rule.id, severity=rule.severity, title=rule.title, seen=seen or None,
        advice=rule.advice, reference=rule.reference,
    )  # fmt: skip
