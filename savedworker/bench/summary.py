"""From samples to medians and ratios, as JSON and as a short Markdown table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


@dataclass
class Figure:
    """One line of the table. ``against`` and ``ratio``: the same thing without us, in the same run."""

    what: str
    value: float
    unit: str
    against: float | None = None
    target: str = ""
    samples: list[float] = field(default_factory=list)
    than: str = ""
    """What it is against."""

    @property
    def ratio(self) -> float | None:
        return self.value / self.against if self.against else None


def figure(
    what: str,
    samples: list[float],
    unit: str,
    against: list[float] | None = None,
    target: str = "",
    scale: float = 1.0,
    than: str = "plain runc",
) -> Figure:
    """The median of ``samples`` (times ``scale``) beside that of ``against``."""
    other = median(against) * scale if against else None
    rounded = [round(x * scale, 4) for x in samples]
    return Figure(what, median(samples) * scale, unit, other, target, rounded, than if against else "")


@dataclass
class Results:
    """``figures`` so far, and in ``notes`` where time was spent. ``header`` describes machine and run."""

    header: dict[str, Any]
    figures: list[Figure]
    notes: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return {
            "format": 1,
            **self.header,
            "figures": [{**asdict(f), "ratio": f.ratio and round(f.ratio, 3)} for f in self.figures],
            "phases": self.notes,
        }

    def machine(self) -> str:
        """The machine and the run in a sentence or two."""
        m = self.header["machine"]
        peer = f", podman {m['podman']}" if "podman" in m else ""
        runs = self.header["runs"]
        samples = "One sample of each" if runs == 1 else f"Medians of {runs} samples"
        return (
            f"{m['cores']} cores ({m['cpu']}), {m['memory_gib']} GiB, kernel {m['kernel']}, cgroup v{m['cgroup']}, {m['disk']}; "
            f"CRIU {m['criu']}, runc {m['runc']}{peer}, Python {m['python']}. "
            f"Load while measuring: {self.header['load_before']} to {self.header['load_after']} "
            f"(one of more than {m['cores']} at the beginning would mean that other work was measured along). {samples} "
            f"into {self.header['store']}; each ratio is of one run. Page cache: {self.header['page_cache']}."
        )

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Figure, ours, against, ratio, target."""
        return [
            (
                f.what,
                f"{f.value:.3g} {f.unit}",
                f"{f.against:.3g} {f.unit} ({f.than})" if f.against is not None else "",
                f"{f.ratio:.2f}" if f.ratio is not None else "",
                f.target,
            )
            for f in self.figures
        ]

    def spent(self) -> list[str]:
        """Where time was spent, a line each."""
        return [
            f"{what} (seconds): " + "; ".join(f"{k} {v:.3f}" for k, v in parts.items()) + "."
            for what, parts in self.notes.items()
        ]


HEADER = ("figure", "ours", "against", "ratio", "target")


def write(folder: Path, name: str, results: Results) -> tuple[Path, Path]:
    """Write ``name``.json and ``name``.md. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_text = folder / f"{name}.json", folder / f"{name}.md"
    as_json.write_text(json.dumps(results.document(), indent=1) + "\n")
    as_text.write_text(table(name, results))
    return as_json, as_text


def table(name: str, results: Results) -> str:
    """The Markdown page."""
    lines = [f"# Measured {name}", "", results.machine(), ""]
    lines += [f"| {' | '.join(HEADER)} |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in results.rows()]
    for line in results.spent():
        lines += ["", line]
    return "\n".join(lines) + "\n"
