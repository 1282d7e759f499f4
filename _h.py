import sys, time
from jspec import Tree, NGram, Suffix, Beside, Eagle3
from tests.step import test_h200_round as r
from jspec.tools.bench import step as rounds
base = dict(rounds.DRAFTERS)
C=Tree.chain(4)
cases = {
 "head chain": (C, None),
 "replace ngram": (C, lambda h,t: Beside(Eagle3(h,t), NGram(C))),
 "replace suffix": (C, lambda h,t: Beside(Eagle3(h,t), Suffix(C))),
 "replace suffix t": (C, lambda h,t: Beside(Eagle3(h,t), Suffix(C), threshold=4)),
 "beside chain ngram": (C, lambda h,t: Beside(Eagle3(h,t), NGram(C), "beside")),
 "static tree head": (Tree.static([(0,),(1,),(0,0),(0,0,0),(0,0,0,0),(1,0)]), None),
 "topk": (Tree.topk(60,8,10), None),
 "beside topk": (Tree.topk(60,8,10), lambda h,t: Beside(Eagle3(h,t), NGram(Tree.chain(4)), "beside")),
}
only=sys.argv[1:]
for name,(tree,make) in cases.items():
    if only and name not in only: continue
    rounds.DRAFTERS["eagle3"] = base["eagle3"] if make is None else make
    s=time.time(); p,b = r.compile_round.__wrapped__(tree)
    print(name, len(p.launches), "launches", len(p.graphs), "graphs", len(p.outside_graphs), "outside", p.temp_bytes>>20, "MiB", "alias ok", p.alias_bytes==b, "copies", len(p.copies(1<<20)), round(time.time()-s), "s", flush=True)
    if make: open("/tmp/m/launch_"+name.replace(" ","_")+".txt","w").write("\n".join(f"{l.kind} {l.name}" for l in p.launches))
    else: open("/tmp/m/launch_"+name.replace(" ","_")+".txt","w").write("\n".join(f"{l.kind} {l.name}" for l in p.launches))
