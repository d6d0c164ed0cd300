"""Counts what changes between two Python sources in statements: layout and comments are free."""

import ast
import difflib


class Statements(ast.NodeTransformer):
    """Leaves docstrings and imports out."""

    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) else node

    def visit_Import(self, node):
        return None

    visit_ImportFrom = visit_Import


def changed_statements(before, after):
    """Counts the statements, and the headers of compound ones, that go or come between two sources.

    Unparsed, each of them is one line, also a call that stood over eight lines.
    """
    sides = []
    for source in (before, after):
        lines = ast.unparse(Statements().visit(ast.parse(source))).splitlines()
        sides.append([line for line in lines if line])
    rows = difflib.unified_diff(*sides, lineterm="", n=0)
    return sum(row[0] in "+-" for row in rows if not row.startswith(("+++", "---")))
