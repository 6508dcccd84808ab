"""Every module of rules is in the table: one that nobody imports would leave operators without a rule."""

from __future__ import annotations

from pathlib import Path

from rannd.graph.rows.rules import rule_table

NO_RULES = {"__init__", "operation", "states", "rule_table"}


def test_every_module_of_rules_is_in_the_table() -> None:
    folder = Path(rule_table.__file__).parent
    assert {file.stem for file in folder.glob("*.py")} - NO_RULES == {
        module.__name__.rpartition(".")[2] for module in rule_table.MODULES
    }


def test_the_modules_have_rules() -> None:
    homes = {rule.__module__ for rule in rule_table.RULES.values()}
    assert homes >= {module.__name__ for module in rule_table.MODULES}
    assert len(rule_table.RULES) > 300
