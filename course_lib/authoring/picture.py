"README's picture, drawn as SVG from the recorded figures of lesson 05, so that it can't disagree with them."

from course_lib import recorded

PATH = ".github/where-the-time-goes.svg"
CLASSES = {"contraction": "#0072B2", "normalisation": "#D55E00", "elementwise": "#009E73"}
NAMES = {
    "contraction": "matrix products",
    "normalisation": "normalisation, softmax",
    "elementwise": "element-wise",
}
LEFT, WIDTH, BAR, GAP, TOP = 150, 560, 34, 20, 66


def svg():
    """The picture as SVG text: each class of operator's share of FLOPs, and of time, eager and compiled.

    Returns None while lesson 05 has no recorded figures.
    """
    found = {f["name"]: f for f in recorded.figures("05")}
    rows = [
        ("FLOPs", "05.encoder_flop_share.{}"),
        ("time, eager", "05.encoder_time_share.{}.eager"),
        ("time, compiled", "05.encoder_time_share.{}.compiled"),
    ]
    if not all(pattern.format(c) in found for _, pattern in rows for c in CLASSES):
        return None
    machine = found["05.encoder_flop_share.contraction"]["machine"]
    height = TOP + len(rows) * (BAR + GAP) + 34
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 30} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14" role="img">',
        "<title>Share of FLOPs and of time by class of operator, training a BERT-like encoder</title>",
        f'<rect width="{LEFT + WIDTH + 30}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="bold">Where did the time go?</text>',
    ]
    x = LEFT
    for c, colour in CLASSES.items():
        out.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 18}" y="49" font-size="13">{NAMES[c]}</text>')
        x += 42 + 8 * len(NAMES[c])
    for i, (label, pattern) in enumerate(rows):
        y = TOP + i * (BAR + GAP)
        out.append(f'<text x="{LEFT - 12}" y="{y + BAR / 2 + 5:g}" text-anchor="end">{label}</text>')
        x = float(LEFT)
        for c, colour in CLASSES.items():
            share = found[pattern.format(c)]["value"]
            w = WIDTH * share / 100
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{BAR}" fill="{colour}"/>')
            if share >= 8:
                place = f'x="{x + w / 2:.1f}" y="{y + BAR / 2 + 5:g}"'
                out.append(f'<text {place} fill="white" text-anchor="middle">{share:.1f} %</text>')
            x += w
    out.append(
        f'<text x="{LEFT}" y="{height - 14}" font-size="12" fill="#555">'
        f"One training step of a BERT-like encoder, measured by lesson 05 on one {machine}.</text>"
    )
    return "\n".join([*out, "</svg>", ""])
