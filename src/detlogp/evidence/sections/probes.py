"""Whose kernels ran on each route: `detlogp probe`, as checks."""

from collections.abc import Callable, Iterator
from functools import partial

from detlogp.evidence import probe
from detlogp.evidence.routes import ALL
from detlogp.evidence.sections._check import Check, Options, Result


def checks(options: Options) -> Iterator[Check]:
    for form in probe.TRAINING_FORMS:
        run = partial(probe.probe_training, form, options.device)
        yield Check(f"training, {form.name}", "float32", partial(_judge, run, options))
    for name in probe.routes(options.quick):
        if ALL[name].order <= options.max_order:
            run = partial(probe.probe_route, name, options.device)
            yield Check(name, "float32", partial(_judge, run, options), ALL[name].order)


def _judge(run: Callable[[], probe.Ran], options: Options) -> Result:
    ran = run()
    options.probed.append(ran._asdict())
    counts = ran.own_kernels or ran.own_operators
    text = ", ".join(f"{count} {name.split('::')[-1]}" for name, count in sorted(counts.items()))
    return Result("fail", ran.complaint) if ran.complaint else Result("pass", text)
