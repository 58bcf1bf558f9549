import sys; sys.path.insert(0,"bench")
import torch, json, gc, time
import gpu_core as G, fxoffload
from torch.profiler import profile, ProfilerActivity
# 1. first-step gradients, plain twice and ours
def grads(m,data):
    loss=m(**data).loss; loss.backward()
    g={k:p.grad.detach().float().cpu().clone() for k,p in m.named_parameters() if p.grad is not None}
    return loss.item(), g
m=G.lora_model(2,"cuda"); G.jolt(m); a=grads(m,G.batch(2,1024,"cuda")); m.zero_grad(); b=grads(m,G.batch(2,1024,"cuda")); del m; G.forget()
for budget in ("40GiB","5GiB"):
    m=G.lora_model(2,"cpu"); G.jolt(m); G.forget()
    fxoffload.compile(m,G.batch(2,1024,"cpu"),device="cuda",device_budget=budget)
    c=grads(m,G.batch(2,1024,"cuda"))
    print(budget,"loss",a[0],b[0],c[0],"plain==plain",sum(torch.equal(a[1][k],b[1][k]) for k in a[1]),"ours==plain",sum(torch.equal(a[1][k],c[1][k]) for k in a[1]),"of",len(a[1]),"mincos",min(G.cosines(a[1],c[1])), "reserved",torch.cuda.max_memory_reserved(),"pred",m.fxoffload.plan.predicted.device_peak_bytes)
    if budget=="40GiB":
        for n in m.fxoffload.graphs["train"].nodes:
            if "attention" in str(n.target): print(n.format_node()[:200]); break
        from fxoffload import neutral
        orig=neutral.backend_of; seen=set()
        def spy(*x):
            r=orig(*x); seen.add(str(r)); return r
        neutral.backend_of=spy
        m(**G.batch(2,1024,"cuda")); print("backend",seen); neutral.backend_of=orig
    worst=sorted(a[1],key=lambda k: torch.nn.functional.cosine_similarity(a[1][k].flatten().double(),c[1][k].flatten().double(),dim=0))[:4]
    print([(k,(a[1][k]-c[1][k]).abs().max().item(),a[1][k].abs().max().item()) for k in worst])
    m.fxoffload.close(); del m; G.forget()
# 2. profile the 8-layer 8B-width step
m=G.lora_model(8,"cpu"); G.forget()
bud=sys.argv[1]
t=time.time(); fxoffload.compile(m,G.batch(4,2048,"cpu"),device="cuda",device_budget=bud); print("compile",time.time()-t, m.fxoffload.plan.explain())
data=G.batch(4,2048,"cuda"); l,s,_=G.steps(m,data,5); print("steps",s,"reserved",torch.cuda.max_memory_reserved(),"alloc",torch.cuda.max_memory_allocated(),"pred",m.fxoffload.plan.predicted.device_peak_bytes)
opt=torch.optim.AdamW([p for p in m.parameters() if p.requires_grad],lr=1e-3)
with profile(activities=[ProfilerActivity.CPU,ProfilerActivity.CUDA]) as prof:
    torch.cuda.synchronize(); t0=time.perf_counter(); loss=m(**data).loss; torch.cuda.synchronize(); t1=time.perf_counter(); loss.backward(); tb=time.perf_counter(); torch.cuda.synchronize(); t2=time.perf_counter(); opt.step(); t3=time.perf_counter()
print("fw",t1-t0,"bw host",tb-t1,"bw",t2-t1,"opt",t3-t2)
ev=[e for e in prof.events() if str(e.device_type).endswith("CUDA")]
import collections
by=collections.Counter(); lanes=collections.defaultdict(list)
for e in ev:
    k="memcpy "+e.name[:30] if "emcpy" in e.name else "kernel"
    by[k]+=e.time_range.elapsed_us(); lanes["copy" if "HtoD" in e.name or "DtoH" in e.name else "compute"].append((e.time_range.start,e.time_range.end,e.name))
print({k:v/1e6 for k,v in by.items()})
L=sorted(lanes["compute"]); gaps=[(L[i+1][0]-L[i][1],L[i][2][:40],L[i+1][2][:40],L[i][1]-L[0][0]) for i in range(len(L)-1)]
print("compute span",(L[-1][1]-L[0][0])/1e6,"busy",sum(b-a for a,b,_ in L)/1e6,"gaps>100us",sum(g[0] for g in gaps if g[0]>100)/1e6, "gaps<100us",sum(g[0] for g in gaps if 0<g[0]<=100)/1e6, len(gaps))
for g in sorted(gaps,reverse=True)[:14]: print(g)
top=collections.Counter()
for e in ev: top[e.name[:70]]+=e.time_range.elapsed_us()
for k,v in top.most_common(14): print(round(v/1e3,1),"ms",k)
