"""The page's style sheet: two palettes, fonts that every machine has, nothing fetched."""

from __future__ import annotations

CSS = """
:root{--paper:#f8f6f1;--sheet:#fffdf9;--ink:#1e1b17;--muted:#625c53;--rule:#dcd6ca;--series-1:#b23a12;
--series-2:#28618c;--series-3:#6b6459;--hole:#e9e4d9}
@media (prefers-color-scheme:dark){:root{--paper:#151311;--sheet:#1d1a17;--ink:#eee8de;--muted:#a99f91;
--rule:#39332c;--series-1:#ff8f5f;--series-2:#82b9e2;--series-3:#a99f91;--hole:#2a2621}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:0 20px 64px;max-width:1080px;background:var(--paper);color:var(--ink);
font:17px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.skip{position:absolute;left:-999px}.skip:focus{left:12px;top:12px;background:var(--sheet);padding:6px 10px}
header{padding:56px 0 20px}
.mark{margin:0 0 14px;letter-spacing:.22em;text-transform:uppercase;font-size:13px;color:var(--series-1);
font-weight:600}
h1,h2{font-family:"Iowan Old Style","Palatino Linotype",Palatino,"Book Antiqua",Georgia,serif;font-weight:600;
line-height:1.18;text-wrap:balance}
h1{margin:0;font-size:clamp(29px,5.2vw,50px);letter-spacing:-.01em;max-width:22em}
h2{margin:0 0 10px;font-size:clamp(23px,3vw,30px)}
h3{margin:28px 0 8px;font-size:17px}
.lede{margin:18px 0 0;max-width:44em;color:var(--muted);font-size:18px}
section{padding:34px 0 12px;border-top:1px solid var(--rule);margin-top:30px}
section>p{max-width:44em}
figure{margin:0;min-width:0}
figcaption{margin-top:8px;color:var(--muted);font-size:14.5px;line-height:1.45;max-width:60em}
img{display:block;width:100%;height:auto;image-rendering:auto}
.clips{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,230px),1fr));gap:22px;margin-top:18px}
.clips .pair{display:grid;grid-template-columns:1fr 1fr;gap:3px}
.clips figcaption{font-size:13.5px}
.moving{aspect-ratio:1;background-repeat:no-repeat;background-position:0 0;
animation:play calc(var(--frames)*.14s) steps(var(--frames),jump-none) infinite alternate}
@keyframes play{to{background-position:100% 0}}
@media (prefers-reduced-motion:reduce){.moving{animation:none}}
.strips{display:grid;gap:18px;margin-top:18px}
.strips figure{max-width:880px}
.holes{background:repeating-linear-gradient(45deg,var(--hole) 0 4px,var(--sheet) 4px 8px)}
.locals{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:18px;max-width:880px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:26px;margin-top:18px}
.charts.films{grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr))}
.chart{display:block;width:100%;height:auto;background:var(--sheet);border:1px solid var(--rule);
border-radius:6px}
.chart text{fill:var(--muted);font-size:13px;font-family:inherit}
.chart .label{fill:var(--ink);font-size:13.5px}
.chart .grid{stroke:var(--rule);stroke-width:1}
.chart .axis{stroke:var(--muted);stroke-width:1}
.chart .reference{stroke:var(--series-3);stroke-width:1.3;stroke-dasharray:5 4}
.chart .curve{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.chart .band{opacity:.16}
.chart .mark-line{stroke:var(--series-3);stroke-width:1;stroke-dasharray:2 3}
.legend{display:flex;flex-wrap:wrap;gap:6px 18px;margin:8px 0 0;font-size:14.5px;color:var(--muted)}
.legend i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:7px;vertical-align:middle}
.scroll{overflow-x:auto;margin-top:18px}
table{border-collapse:collapse;width:100%;min-width:310px;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:0 0 8px}
th,td{text-align:left;vertical-align:top;padding:11px 16px 11px 0;border-bottom:1px solid var(--rule)}
thead th{font-size:14px;font-weight:600;color:var(--muted);padding:6px 16px 6px 0}
tbody th{font-weight:500;width:32%}
td strong{font-size:19px}
small{color:var(--muted);font-size:13px;white-space:nowrap}
.interval{display:block;position:relative;height:9px;margin-top:6px;max-width:240px;
border-bottom:1px solid var(--rule)}
.interval i{position:absolute;bottom:2px;height:4px;border-radius:2px;opacity:.42}
.interval b{position:absolute;bottom:0;width:8px;height:8px;margin-left:-4px;border-radius:50%}
.neighbours{display:grid;gap:30px;margin-top:18px;max-width:900px}
.neighbours .set{display:grid;grid-template-columns:minmax(84px,1fr) minmax(0,5fr);gap:16px;align-items:start}
.neighbours .found{display:grid;gap:12px}
.neighbours .line{display:grid;grid-template-columns:repeat(5,1fr);gap:8px}
.neighbours figcaption{font-size:13px;margin-top:3px;overflow-wrap:anywhere}
.line figcaption{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:2;overflow:hidden}
.same img,.same .moving{outline:3px solid var(--series-1);outline-offset:-3px}
.same figcaption{color:var(--series-1);font-weight:600}
.who{font-size:13.5px;color:var(--muted);margin:0}
.how{margin:14px 0 0;font-size:14.5px;line-height:1.5;color:var(--muted);max-width:60em}
.how b{color:var(--ink);font-weight:600}
.part{margin-top:34px}.part h3{margin:0 0 4px;font-size:20px}.part>p{max-width:44em;margin:0 0 4px}
.part>.how{margin-top:14px}
.study{margin-top:20px;overflow-x:auto;padding-bottom:4px}
.study>figcaption{margin:0 0 6px;color:var(--ink)}
.layer{display:flex;gap:3px 8px;align-items:center;max-width:calc(112px + (var(--frames) + 1)*128px);
min-width:calc((var(--frames) + 1)*60px);margin-top:4px}
.layer .who{flex:0 0 104px}.layer .moving{flex:1 1 0;min-width:0}
.layer img{flex:var(--frames) 1 0;min-width:0;width:0}
.layer .moving,.layer img,.heads .moving,.neighbours .moving{border-radius:3px}
.heads figcaption{font-size:13px;margin-top:3px}
.heads{display:grid;grid-template-columns:repeat(auto-fill,minmax(72px,92px));gap:10px;margin-top:6px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:1px;margin-top:28px;
background:var(--rule);border:1px solid var(--rule);border-radius:6px;overflow:hidden}
.tiles div{background:var(--sheet);padding:14px 16px;border:0}
.tiles dt{font-size:13.5px}
.tiles dd{font-size:23px;line-height:1.25;font-variant-numeric:tabular-nums}
.tiles small{display:block;white-space:normal;margin-top:2px}
.share{display:block;height:6px;max-width:220px;margin-top:6px;border-radius:3px;background:var(--hole);
overflow:hidden}
.share i{display:block;height:100%;background:var(--series-2)}
.note{border-left:3px solid var(--series-1);padding:2px 0 2px 14px;max-width:44em}
details pre{max-height:480px}
dl{margin:16px 0 0;display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:0 32px}
dl div{padding:10px 0;border-bottom:1px solid var(--rule)}
dt{color:var(--muted);font-size:14px}
dd{margin:0;overflow-wrap:anywhere}
pre{overflow-x:auto;background:var(--sheet);border:1px solid var(--rule);border-radius:6px;padding:16px 18px;
font:14px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre i{color:var(--muted);font-style:normal}
details{margin-top:16px}summary{cursor:pointer;color:var(--muted)}
:focus-visible{outline:2px solid var(--series-2);outline-offset:3px}
footer{margin-top:44px;padding-top:16px;border-top:1px solid var(--rule);color:var(--muted);font-size:14px}
@media (max-width:560px){body{padding:0 16px 48px;font-size:16px}header{padding-top:32px}
.clips{grid-template-columns:repeat(2,1fr);gap:16px}
.tiles{grid-template-columns:repeat(2,1fr);margin-top:20px}.tiles dd{font-size:20px}
.heads{grid-template-columns:repeat(4,1fr)}
.layer{flex-wrap:wrap}.layer .who{flex-basis:100%;margin-top:4px}
.neighbours .set{grid-template-columns:1fr}.neighbours .query{max-width:110px}
th,td{padding-right:10px}}
@media print{.moving{animation:none;print-color-adjust:exact}details pre{max-height:none}
section{break-inside:avoid}}
"""
