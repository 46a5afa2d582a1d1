"""Decode rates of a GPU as an SVG: one panel a model, wkvm beside the peer and the limit.

plot_bench.py results/gpu.json docs/gpu.svg"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench_gpu import peers
from gpu_report import peer_rates
from gpu_targets import decode_results

PANEL, GAP, COLUMNS = (400, 300), (64, 48), 2
HEAD = 34
COLOURS = {"float32": "#c2410c", "float16": "#1d4ed8", "bfloat16": "#0f766e"}
STYLES = {"wkvm": "", "peer": "6 4", "limit": "1 4"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("svg", type=Path)
    given = parser.parse_args()
    given.svg.write_text(plot(json.loads(given.results.read_text()), peers()))


def plot(document: dict, known: dict) -> str:
    """The picture; a panel for each model with decode rates."""
    rates = decode_results(document["jobs"], sampled=False)
    models = list(dict.fromkeys(model for model, _ in rates))
    if not models:
        raise SystemExit("the results hold no decode rates")
    columns = min(COLUMNS, len(models))
    width = columns * (PANEL[0] + GAP[0]) + 16
    height = math.ceil(len(models) / columns) * (PANEL[1] + GAP[1]) + HEAD + 16
    about = document["about"]
    title = f"Decode, tokens/s against rows in a step. {about['card']}, commit {about['commit'] or '?'}. "
    title += f"Solid: wkvm; dashed: {known['peer']}; dotted: limit."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{height}" fill="white"/>',
        text(GAP[0] - 40, 20, title, "start"),
    ]
    for place, model in enumerate(models):
        left = GAP[0] + place % columns * (PANEL[0] + GAP[0]) - 8
        top = HEAD + 16 + place // columns * (PANEL[1] + GAP[1])
        own = {dtype: values for (name, dtype), values in rates.items() if name == model}
        parts += panel(model, own, known, left, top)
    return "\n".join([*parts, "</svg>", ""])


def panel(model: str, own: Mapping[str, Mapping[int, float]], known: dict, left: float, top: float) -> Iterator[str]:
    """Both axes are logarithmic: rows from 1, rates in whole decades."""
    curves = [(dtype, "wkvm", values) for dtype, values in own.items()]
    for dtype in own:
        curves += [
            (dtype, kind, peer_rates(known, name, model, dtype))
            for kind, name in (("peer", "decode"), ("limit", "limits"))
        ]
    values = [rate for _, _, curve in curves for rate in curve.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    most = max(1.0, math.log2(max(rows for _, _, curve in curves for rows in curve)))
    width, height = PANEL

    def x(rows: float) -> float:
        return left + width * math.log2(rows) / most

    def y(rate: float) -> float:
        return top + height * (high - math.log10(rate)) / (high - low)

    yield f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#888"/>'
    yield text(left + 8, top + 16, model, "start")
    for power in range(low, high + 1):
        yield line(left, y(10**power), left + width, y(10**power))
        yield text(left - 4, y(10**power) + 4, f"{10**power:,}", "end")
    for rows in sorted({rows for _, _, curve in curves for rows in curve}):
        yield line(x(rows), top, x(rows), top + height)
        yield text(x(rows), top + height + 14, str(rows), "middle")
    for dtype, kind, curve in curves:
        points = " ".join(f"{x(rows):.1f},{y(rate):.1f}" for rows, rate in sorted(curve.items()))
        if points:
            style = f'stroke="{COLOURS.get(dtype, "#444")}" stroke-width="1.8" stroke-dasharray="{STYLES[kind]}"'
            yield f'<polyline points="{points}" fill="none" {style}/>'
    for place, dtype in enumerate(own):
        words = text(left + width - 8, top + height - 10 - 16 * place, f"{dtype} state", "end")
        yield words.replace("<text ", f'<text fill="{COLOURS.get(dtype, "#444")}" ', 1)


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e5e5e5"/>'


def text(x: float, y: float, words: str, anchor: str) -> str:
    escaped = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped}</text>'


if __name__ == "__main__":
    main()
