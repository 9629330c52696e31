"""Draw the picture of the parts, parts.svg, for the architecture page.

    python docs/parts.py > docs/parts.svg

All text is on a filled shape and lines are a middle grey, so that it is legible on dark and on light pages.
"""

from __future__ import annotations

import sys
from xml.sax.saxutils import escape

WIDTH = 960
HEIGHT = 400
INK = '#1f2733'
PAPER = '#f4f6f9'
LINE = '#7d8794'
# Colours of ecomp's programs, of what it works with, of a guest, and of a hypervisor's frame.
OUR_COLOUR = '#1f5fa8'
BACKEND_COLOUR = '#5b4b8a'
GUEST_COLOUR = '#3d6b4f'
HOST_COLOUR = '#d9e0e8'
"""Colours of what ecomp is, of what it works with, of a guest, and of a hypervisor's frame."""


def draw() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="DejaVu Sans, Verdana, Arial, sans-serif" role="img">',
        '<title>eschedule, placement, etcd, and on each hypervisor ecompute, libvirt, mdserver and guests</title>',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 10 5 0 10z" fill="{LINE}"/></marker></defs>',
        f'<rect x="575" y="5" width="380" height="390" rx="10" fill="{HOST_COLOUR}"/>',
        f'<text x="765" y="32" text-anchor="middle" font-size="14" fill="{INK}">each hypervisor</text>',
        _draw_box(5, 50, 120, 330, 'eschedule', 'in your shell', OUR_COLOUR),
        _draw_box(285, 50, 165, 110, 'placement', 'truth of capacity', BACKEND_COLOUR),
        _draw_box(285, 270, 165, 110, 'etcd', 'requests, records', BACKEND_COLOUR),
        _draw_box(595, 50, 130, 330, 'ecompute', 'builds, watches', OUR_COLOUR),
        _draw_box(815, 50, 125, 80, 'libvirt', 'domain, disk', BACKEND_COLOUR),
        _draw_box(815, 175, 125, 80, 'guest', 'cloud-init', GUEST_COLOUR),
        _draw_box(815, 300, 125, 80, 'mdserver', 'metadata', OUR_COLOUR),
        _draw_arrow(125, 80, 285, 80, '1 who could?'),
        _draw_arrow(125, 130, 285, 130, '2 claim'),
        _draw_arrow(125, 300, 285, 300, '3 request'),
        _draw_arrow(285, 350, 125, 350, '6 address'),
        _draw_arrow(595, 80, 450, 80, 'inventory'),
        _draw_arrow(595, 130, 450, 130, 'claimed?'),
        _draw_arrow(450, 300, 595, 300, '4 watch'),
        _draw_arrow(595, 350, 450, 350, 'record'),
        _draw_arrow(725, 90, 815, 90, '5 build'),
        _draw_arrow(725, 340, 815, 340, 'files'),
        _draw_arrow(877, 130, 877, 175),
        _draw_arrow(877, 255, 877, 300),
    ]
    return '\n'.join([*parts, '</svg>']) + '\n'


def _draw_box(x: int, y: int, width: int, height: int, name: str, caption: str, fill: str) -> str:  # noqa: PLR0913
    middle, half = x + width // 2, y + height // 2
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}"/>'
        f'<text x="{middle}" y="{half - 3}" text-anchor="middle" fill="white" font-size="17" font-weight="bold">'
        f'{escape(name)}</text>'
        f'<text x="{middle}" y="{half + 18}" text-anchor="middle" fill="white" font-size="13">{escape(caption)}</text>'
    )


def _draw_arrow(x: int, y: int, to_x: int, to_y: int, caption: str = '') -> str:
    line = f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{LINE}" stroke-width="2" marker-end="url(#head)"/>'
    if not caption:
        return line
    middle, width = (x + to_x) // 2, 16 + 7 * len(caption)
    return (
        f'{line}<rect x="{middle - width // 2 - 2}" y="{y - 12}" width="{width}" height="23" rx="11" fill="{PAPER}"'
        f' stroke="{LINE}"/><text x="{middle - 2}" y="{y + 4}" text-anchor="middle" fill="{INK}" font-size="12">'
        f'{escape(caption)}</text>'
    )


if __name__ == '__main__':
    sys.stdout.write(draw())
