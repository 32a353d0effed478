"""The style of the report's page: light and dark by the reader's choice, one column on a phone. No file beside it."""

STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1c2430;--dim:#525d6b;--line:#d9dee6;
--good:#126339;--good-bg:#e3f5ea;--bad:#a3211a;--bad-bg:#fde8e6;--busy:#7a4f00;--busy-bg:#fdf1d6;
--quiet:#525d6b;--quiet-bg:#eceff3;--bar:#3b6fb6;--l0:#3b6fb6;--l1:#8a4fb0;--l2:#0f766e;--l3:#b45309}
@media (prefers-color-scheme:dark){:root{--bg:#11151b;--card:#1a2029;--ink:#e6eaf0;--dim:#9aa6b5;--line:#313a47;
--good:#6fd39b;--good-bg:#16301f;--bad:#ff9d94;--bad-bg:#3d1a18;--busy:#f0c265;--busy-bg:#372a0e;
--quiet:#9aa6b5;--quiet-bg:#252d38;--bar:#6ea0e6;--l0:#6ea0e6;--l1:#c496e6;--l2:#5cc9bd;--l3:#f0a75c}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:1.35rem;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:1.02rem;margin:0 0 10px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px;margin-top:16px}
.dim,small{color:var(--dim)}
.verdict{border-left:6px solid;border-radius:10px;padding:14px 16px;margin-top:14px}
.verdict strong{display:block;font-size:1.12rem;overflow-wrap:anywhere}
.verdict.good{background:var(--good-bg);border-color:var(--good)}
.verdict.bad{background:var(--bad-bg);border-color:var(--bad)}
.verdict.busy{background:var(--busy-bg);border-color:var(--busy)}
.verdict.quiet{background:var(--quiet-bg);border-color:var(--quiet)}
.good>strong,.tone-good{color:var(--good)}.bad>strong,.tone-bad{color:var(--bad)}
.busy>strong,.tone-busy{color:var(--busy)}.quiet>strong,.tone-quiet{color:var(--quiet)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;margin:0}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere;min-width:0}
code,pre,.mono{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;font-size:.88em}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--quiet-bg);border-radius:6px;
padding:10px;margin:8px 0 0}
table{width:100%;border-collapse:collapse}
th,td{text-align:left;vertical-align:top;padding:6px 10px 6px 0;border-top:1px solid var(--line);overflow-wrap:anywhere}
th{color:var(--dim);font-weight:500;border-top:0;white-space:nowrap}
td.number,th.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.badge{display:inline-block;border-radius:99px;padding:0 9px;font-size:.85em;white-space:nowrap}
.badge.good{background:var(--good-bg);color:var(--good)}.badge.bad{background:var(--bad-bg);color:var(--bad)}
.badge.busy{background:var(--busy-bg);color:var(--busy)}.badge.quiet{background:var(--quiet-bg);color:var(--quiet)}
.step{display:grid;grid-template:"label track time"/minmax(8em,16em) 1fr 6.5em;gap:0 12px;align-items:center}
.step .label{grid-area:label;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.step .time{grid-area:time;text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.track{grid-area:track;background:var(--quiet-bg);border-radius:4px;height:14px;overflow:hidden}
.bar{background:var(--bar);height:14px;border-radius:4px;min-width:2px}
p{margin:0 0 8px}.card>:last-child{margin-bottom:0}
h3{font-size:.92rem;margin:16px 0 6px;color:var(--dim);font-weight:600}
details{margin-top:8px}summary{cursor:pointer;color:var(--dim)}
ul{margin:6px 0 0;padding-left:20px}li{overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto}
.tall{display:none}
svg text{fill:var(--ink);font-size:12.5px}
svg .name{font-size:15.5px;font-weight:600}svg .role,svg .small{fill:var(--dim)}svg .small{font-size:11px}
svg .fact{fill:var(--dim);font-size:12px}svg .fact.mono{font-size:11px}
svg .phase{font-weight:600}svg .phase.good{fill:var(--good)}svg .phase.bad{fill:var(--bad)}
svg .phase.busy{fill:var(--busy)}svg .phase.quiet{fill:var(--quiet)}
svg .box{fill:var(--card);stroke:var(--line);stroke-width:1.2}svg .box.bad{stroke:var(--bad)}
svg .edge.good{fill:var(--good)}svg .edge.bad{fill:var(--bad)}svg .edge.busy{fill:var(--busy)}
svg .edge.quiet{fill:var(--quiet)}
svg .link{fill:none;stroke-width:2.4}svg .port{stroke:var(--card);stroke-width:1.5}
svg .lane0{stroke:var(--l0)}svg .lane1{stroke:var(--l1)}svg .lane2{stroke:var(--l2)}svg .lane3{stroke:var(--l3)}
svg .port.lane0{fill:var(--l0)}svg .port.lane1{fill:var(--l1)}svg .port.lane2{fill:var(--l2)}
svg .port.lane3{fill:var(--l3)}
@media (max-width:720px){main{padding:14px 10px 32px}.card{padding:12px}
.wide{display:none}.tall{display:block}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:8px}
.step{grid-template:"label time" "track track"/minmax(0,1fr) auto;margin-bottom:4px}
table.stack thead{display:none}table.stack tr{display:block;border-top:1px solid var(--line);padding:8px 0}
table.stack td{display:block;border:0;padding:1px 0}
table.stack td.number{text-align:left}
table.stack td[data-name]:before{content:attr(data-name) " ";color:var(--dim)}}
@media print{body{background:#fff}.card{break-inside:avoid}}
"""
