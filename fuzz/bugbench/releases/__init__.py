"""The bug bench on real releases: pairs on PyPI of which the first carries a known fault and the second its fix.

The fuzzer has to see the fault in the first and not to see it in the second. `records` reads ``pairs.toml``, where
each pair says where to hunt and what the fault looks like; `environments` builds what a release needs to run;
`hunt` is one hunt, in the process of that release; `runner` does them all and can be stopped at any time; `page`
shows what came of it. The command is ``python -m fuzz.bugbench.releases``.
"""
