"""Counts what changes between two Python sources in statements: layout and comments are free."""

import ast
import copy
import difflib


def statements(body, depth=0):
    """Yields every simple statement, and every header of a compound one, as one line.

    Docstrings, imports, comments and layout do not count: a call over eight lines is one statement.
    """
    for node in body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        blocks = [name for name in ("body", "orelse", "finalbody") if getattr(node, name, None)]
        header = copy.copy(node)
        for name in blocks:
            setattr(header, name, [ast.Pass()] if name == "body" else [])
        if isinstance(node, ast.Try):
            header.handlers, header.finalbody = [], [ast.Pass()]
        # An unparsed header ends with the pass that stands for its block.
        lines = ast.unparse(header).splitlines()
        yield from ("  " * depth + line for line in (lines[:-1] if blocks else lines[:1]))
        for name in blocks:
            if name != "body":
                yield "  " * depth + name
            yield from statements(getattr(node, name), depth + 1)
        for handler in getattr(node, "handlers", []):
            yield "  " * depth + "except " + ast.unparse(handler.type)
            yield from statements(handler.body, depth + 1)


def changed_statements(before, after):
    """Counts the statements that go or come between two sources."""
    rows = difflib.unified_diff(
        *(list(statements(ast.parse(text).body)) for text in (before, after)), lineterm="", n=0
    )
    return sum(row[0] in "+-" for row in rows if not row.startswith(("+++", "---")))
