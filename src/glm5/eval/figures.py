"""Charts of a report, drawn with matplotlib's objects on the Agg canvas: no display, no global state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glm5.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Series:
    """A line; x ascending, both lists of the same length."""

    label: str
    x: list[float]
    y: list[float]


def require_matplotlib() -> None:
    """Raises ConfigError naming the extra when charts cannot be drawn; call before long work that ends in a report."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("matplotlib is missing, charts cannot be drawn; pip install 'glm5[report]'") from None


def draw_lines(path: Path, series: Sequence[Series], title: str, x_label: str, y_label: str) -> None:
    """Write a PNG with every series: faint as measured, strong as its running mean over a twentieth of its length."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for item in series:
        (measured,) = axes.plot(item.x, item.y, alpha=0.25, linewidth=1)
        smooth = running_mean(item.y, max(len(item.y) // 20, 1))
        axes.plot(item.x, smooth, color=measured.get_color(), linewidth=2, label=item.label)
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend()
    canvas.print_png(path)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and the up to ``width - 1`` before it."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(end - width, 0):end]
        means.append(sum(window) / len(window))
    return means
