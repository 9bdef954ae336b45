# SPDX-License-Identifier: Apache-2.0
"""The page's style and script: light and dark, straight axes and others."""

from __future__ import annotations

from shardwise.report.svg import FONT, theme_css

_LIGHT = "--paper:#ffffff;--ink:#1c2128;--faint:#5c636d;--line:#dfe3e8;--back:#f4f5f7"
_DARK = "--paper:#14171c;--ink:#e8eaed;--faint:#a3aab4;--line:#2b3038;--back:#0c0e12"

STYLE = f"""
:root{{{_LIGHT};color-scheme:light dark}}
{theme_css("svg", False)}
@media(prefers-color-scheme:dark){{:root{{{_DARK}}}
{theme_css("svg", True)}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 {FONT}}}
main{{max-width:940px;margin:0 auto;padding:28px 20px 60px}}
h1{{font-size:24px;margin:0 0 4px}}
h2{{font-size:17px;margin:34px 0 10px}}
p.about{{margin:0;color:var(--faint)}}
button{{font:inherit;color:var(--ink);background:var(--paper);border:1px solid var(--line);
border-radius:8px;padding:5px 12px;cursor:pointer;white-space:nowrap}}
.figures{{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;
margin:22px 0}}
.figures div{{background:var(--paper);border:1px solid var(--line);border-radius:10px;
padding:10px 14px}}
.figures b{{display:block;font-size:19px;font-variant-numeric:tabular-nums}}
.figures span{{color:var(--faint);font-size:12.5px}}
figure{{margin:16px 0;background:var(--paper);border:1px solid var(--line);border-radius:10px;
padding:8px;overflow-x:auto}}
svg{{display:block;width:100%;height:auto;min-width:640px}}
svg.defs{{position:absolute;width:0;height:0;min-width:0}}
svg text{{font-family:{FONT}}}
.either{{position:relative}}.either figure+figure{{display:none}}
.either.turned figure{{display:none}}.either.turned figure+figure{{display:block}}
.turn{{position:absolute;right:14px;top:14px;font-size:12.5px;padding:3px 10px}}
table.grid th:first-child{{width:24%}}table.grid th{{width:auto}}
table{{border-collapse:collapse;width:100%;background:var(--paper);font-size:13.5px}}
td,th{{border:1px solid var(--line);padding:4px 10px;text-align:left;vertical-align:top;
overflow-wrap:anywhere}}
th{{width:34%;font-weight:500;color:var(--faint)}}
pre{{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:14px;
white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px;line-height:1.45;margin:0}}
"""

SCRIPT = """
for (const turn of document.querySelectorAll('.turn')) turn.addEventListener('click', () => {
  turn.textContent = turn.parentNode.classList.toggle('turned') ? 'straight axes' : 'log axes';
});
"""
