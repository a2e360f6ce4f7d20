"""`loops check`: validate everything a config names, print the report, launch nothing."""

import json
import os

import typer

from loops_cookbook.cli.options import (
    ConfigArgument,
    DebugOption,
    EnvFileOption,
    JsonOption,
    ScopeOption,
    SetOption,
)
from loops_cookbook.cli.reading import tell_reading
from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.recipes.check import CheckReport, check_report
from loops_cookbook.recipes.confirm import confirm
from loops_cookbook.recipes.plans import AnyPlan, plan_config
from loops_cookbook.recipes.sft_check import sft_check_report
from loops_cookbook.recipes.sft_plan import SFTPlan
from loops_cookbook.report.console import print_lines, stdout_kept_for_the_answer
from loops_cookbook.report.trackers import require_trackers


def check(
    config: ConfigArgument,
    set_: SetOption = None,
    scope: ScopeOption = None,
    env_file: EnvFileOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Validate a config and all that it names; launch nothing."""
    loaded = load_config(config, set_ or [])
    environment = read_environment(loaded.directory, env_file=env_file)
    environment.apply()
    tell_reading(loaded)
    with stdout_kept_for_the_answer():
        plan = plan_config(loaded, environment, os.environ, scope)
        require_trackers(plan.config.output)
        report = _report(plan)
    if as_json:
        typer.echo(json.dumps(report.to_json(), ensure_ascii=False, indent=2))
    else:
        print_lines((*report.lines, *report.excerpt), report.warnings)


def _report(plan: AnyPlan) -> CheckReport:
    confirmation = confirm(plan, os.environ)
    if isinstance(plan, SFTPlan):
        return sft_check_report(plan, os.environ, confirmation)
    return check_report(plan, os.environ, confirmation)
