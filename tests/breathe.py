"""A one-time rewrite over the syntax tree: 100 columns, one assignment per line.

    python tests/breathe.py RUFF FILE...

It checks that each file still means the same, and prints what is left for hands (WIDE, SKIP). At 1e791d2c: 1,736
assignments unpacked, lines of src/ 60.0 to 48.5 characters on average, 1.73M characters as before. Then set
line-length in pyproject.toml. Six planted errors of tests/mutations.py have to be adapted.
"""
import ast, io, re, subprocess, sys, textwrap, tokenize
from pathlib import Path
WIDTH = 100
SKIPPED = []

# ---------------------------------------------------------------- packed assignments
def names_loaded(node): return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
def attrs_loaded(node): return {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
def has(node, *kinds): return any(isinstance(n, kinds) for n in ast.walk(node))

def captured_names(func):
    """Names of func's own scope that nested functions/lambdas load."""
    if func is None: return set()
    out = set()
    for n in ast.walk(func):
        if n is not func and isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            out |= names_loaded(n)
    return out

def conflict(t, v, captured, shared):
    """Would evaluating v after t was assigned differ?"""
    if isinstance(t, (ast.Tuple, ast.List)):
        return any(conflict(e, v, captured, shared) for e in t.elts)
    if isinstance(t, ast.Starred): return True
    calls = has(v, ast.Call, ast.Await, ast.Yield, ast.YieldFrom)
    if isinstance(t, ast.Name):
        if t.id in names_loaded(v): return True
        return calls and (t.id in captured or t.id in shared)
    if isinstance(t, ast.Attribute):
        if t.attr in attrs_loaded(v): return True
        root = t
        while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
            root = root.func if isinstance(root, ast.Call) else root.value
        rootname = root.id if isinstance(root, ast.Name) else None
        # a call that may reach the object
        for n in ast.walk(v):
            if isinstance(n, ast.Call):
                if rootname is None or rootname in names_loaded(n): return True
        # property reads on the same object other than plain
        return False
    if isinstance(t, ast.Subscript):
        return bool(names_loaded(t) & names_loaded(v)) or calls and bool(names_loaded(t.value) & names_loaded(v))
    return True

def order_of(targets, values, captured, shared):
    n = len(targets)
    if not any(conflict(targets[i], values[j], captured, shared) for i in range(n) for j in range(i + 1, n)):
        return list(range(n))
    if any(has(v, ast.Call, ast.Await, ast.Yield) for v in values): return None
    # topological: j must be assigned before i if t_i conflicts with v_j
    left, out = list(range(n)), []
    while left:
        for i in left:
            if not any(conflict(targets[i], values[j], captured, shared) for j in left if j != i):
                out.append(i); left.remove(i); break
        else: return None
    return out

def unpack(text, path):
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    offs = [0]
    for l in lines: offs.append(offs[-1] + len(l))
    bl = [l.encode() for l in lines]
    def pos(line, col): return offs[line - 1] + len(bl[line - 1][:col].decode())
    def seg(n): return text[pos(n.lineno, n.col_offset):pos(n.end_lineno, n.end_col_offset)]
    comments = {}
    for tok in tokenize.generate_tokens(io.StringIO(text).readline):
        if tok.type == tokenize.COMMENT: comments[tok.start[0]] = tok
    parent_func = {}
    def walk(node, func):
        for c in ast.iter_child_nodes(node):
            parent_func[c] = func
            walk(c, c if isinstance(c, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) else func)
    walk(tree, None)
    edits = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], (ast.Tuple, ast.List)) and isinstance(node.value, ast.Tuple)): continue
        T, V = node.targets[0].elts, node.value.elts
        if len(T) != len(V) or any(isinstance(x, ast.Starred) for x in [*T, *V]):
            SKIPPED.append((path, node.lineno, "starred")); continue
        if sorted(map(ast.unparse, T)) == sorted(map(ast.unparse, V)): continue
        func = parent_func.get(node)
        shared = set()
        if func is not None:
            for n in ast.walk(func):
                if isinstance(n, (ast.Global, ast.Nonlocal)): shared |= set(n.names)
        order = order_of(T, V, captured_names(func), shared)
        first, last = node.lineno, node.end_lineno
        before = lines[first - 1][:len(bl[first-1][:node.col_offset].decode())]
        after = text[pos(last, node.end_col_offset):offs[last]].strip()
        inner = [l for l in range(first, last) if l in comments]
        if order is None: SKIPPED.append((path, first, "order: " + seg(node)[:90].replace("\n", " "))); continue
        if before.strip() or inner or (after and not after.startswith("#")): SKIPPED.append((path, first, "layout: " + seg(node)[:80].replace("\n"," "))); continue
        out = []
        if after:
            if re.match(r"#\s*(noqa|type:|fmt:)", after): SKIPPED.append((path, first, "pragma")); continue
            out.append(f"{before}{after}\n")
        for i in order:
            s = seg(V[i])
            if "\n" in s or isinstance(V[i], (ast.NamedExpr, ast.GeneratorExp)) and not s.startswith("("): s = f"({s})"
            t = seg(T[i])
            out.append(f"{before}{t} = {s}\n")
        edits.append((offs[first - 1], offs[last], "".join(out)))
    for a, b, new in sorted(edits, reverse=True): text = text[:a] + new + text[b:]
    return text, len(edits)

# ---------------------------------------------------------------- comments and docstrings
def is_prose(line):
    s = line.strip()
    return bool(s) and not re.match(r"([-*+] |\d+\. |>>> |\.\.\.|\||```|\$ )", s) and not re.search(r"\S {2,}\S", s)

def wrap_para(words_lines, indent, prefix, width=WIDTH):
    body = " ".join(l.strip() for l in words_lines)
    return textwrap.wrap(body, width, initial_indent=indent + prefix, subsequent_indent=indent + prefix, break_long_words=False, break_on_hyphens=False)

def comments_pass(text, path):
    lines = text.split("\n")
    toks = list(tokenize.generate_tokens(io.StringIO(text).readline))
    own, trailing = {}, {}
    for t in toks:
        if t.type == tokenize.COMMENT:
            (own if t.line[:t.start[1]].strip() == "" else trailing)[t.start[0]] = t
    # strings spanning lines must not be touched
    out, i = [], 0
    n = len(lines)
    while i < n:
        ln = i + 1
        line = lines[i]
        if ln in own:
            indent = line[:own[ln].start[1]]
            j = i
            block = []
            while j < n and (j + 1) in own and lines[j][:own[j + 1].start[1]] == indent:
                block.append(own[j + 1].string); j += 1
            if any(len(lines[k]) > WIDTH for k in range(i, j)):
                para, res = [], []
                def flush():
                    if para:
                        if any(len(indent) + len("# ") + len(p) > WIDTH for p in para) :
                            res.extend(wrap_para(para, indent, "# "))
                        else:
                            res.extend(f"{indent}# {p}" for p in para)
                        para.clear()
                for c in block:
                    m = re.match(r"#( ?)(.*)$", c)
                    bodytext = m.group(2)
                    if not m.group(1) or not bodytext.strip() or bodytext.startswith(" ") or re.match(r"(noqa|type:|fmt:|----)", bodytext) or not is_prose(bodytext):
                        flush()
                        res.append(indent + c)
                    else: para.append(bodytext)
                flush()
                out.extend(res)
            else:
                out.extend(lines[i:j])
            i = j; continue
        if ln in trailing and len(line) > WIDTH and not re.match(r"#\s*(noqa|type:|fmt:)", trailing[ln].string):
            t = trailing[ln]
            code = line[:t.start[1]].rstrip()
            indent = re.match(r"\s*", line).group(0)
            # only if the line does not begin inside a string
            out.extend(wrap_para([t.string.lstrip("# ").strip() if False else re.sub(r"^#\s*", "", t.string)], indent, "# "))
            out.append(code)
            i += 1; continue
        out.append(line); i += 1
    return "\n".join(out)

def docstring_nodes(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            e = node.body[0]
            if isinstance(e, ast.Expr) and isinstance(e.value, ast.Constant) and isinstance(e.value.value, str): yield e.value

def docstrings_pass(text, path):
    tree = ast.parse(text)
    lines = text.split("\n")
    for d in sorted(docstring_nodes(tree), key=lambda d: -d.lineno):
        a, b = d.lineno - 1, d.end_lineno - 1
        block = lines[a:b + 1]
        if not any(len(l) > WIDTH for l in block): continue
        if not block[0].lstrip().startswith('"""'): SKIPPED.append((path, a + 1, "docstring quotes")); continue
        indent = block[0][:len(block[0]) - len(block[0].lstrip())]
        res, para = [], []
        def flush():
            if not para: return
            ind = re.match(r"\s*", para[0]).group(0)
            if any(len(p) > WIDTH for p in para): res.extend(wrap_para(para, ind, ""))
            else: res.extend(para)
            para.clear()
        for k, l in enumerate(block):
            if not l.strip(): flush(); res.append(l); continue
            if k and not is_prose(l): flush(); res.append(l); continue
            ind = re.match(r"\s*", l).group(0)
            if para and re.match(r"\s*", para[-1]).group(0) != ind: flush()
            para.append(l)
        flush()
        # closing quotes alone stay; a wrapped last line that ends in """ is fine, but move it down if it is too long
        lines[a:b + 1] = res
    return "\n".join(lines)

# ---------------------------------------------------------------- strings
def split_points(prefix, body, raw):
    """Offsets in body after a space, at brace depth 0."""
    points, depth, i = [], 0, 0
    f = "f" in prefix.lower()
    while i < len(body):
        c = body[i]
        if c == "\\" and not raw: i += 2; continue
        if f:
            if c == "{":
                if depth == 0 and body[i:i+2] == "{{": i += 2; continue
                depth += 1
            elif c == "}":
                if depth == 0: i += 2; continue
                depth -= 1
        if c == " " and depth == 0: points.append(i + 1)
        i += 1
    return points

def piece(prefix, quote, body):
    f = "f" in prefix.lower()
    if f and not re.search(r"(?<!\{)(\{\{)*\{(?!\{)", body):
        body = body.replace("{{", "{").replace("}}", "}")
        prefix = prefix.replace("f", "").replace("F", "")
    return f"{prefix}{quote}{body}{quote}"

def strings_pass(text, path):
    """Split one string per long line; returns (text, changed)."""
    tree = ast.parse(text)
    docs = {(d.lineno, d.col_offset) for d in docstring_nodes(tree)}
    toks = [t for t in tokenize.generate_tokens(io.StringIO(text).readline)]
    lines = text.split("\n")
    edits = []
    sig = [t for t in toks if t.type not in (tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)]
    stack = []; done = set()
    for k, t in enumerate(sig):
        if t.type == tokenize.OP:
            if t.string in "([{":
                prev = sig[k - 1]
                call = t.string == "(" and (prev.type == tokenize.NAME and prev.string not in ("return", "in", "and", "or", "not", "if", "else", "yield", "raise", "is", "assert", "lambda", "del", "await", "for", "while", "elif", "with", "as", "import", "from") or prev.type == tokenize.OP and prev.string in ")]")
                stack.append("call" if call else t.string)
            elif t.string in ")]}":
                stack.pop()
        if t.type != tokenize.STRING or t.start[0] != t.end[0]: continue
        if (t.start[0], t.start[1]) in docs: continue
        line = lines[t.start[0] - 1]
        if len(line) <= WIDTH or t.start[0] in done: continue
        m = re.match(r"([A-Za-z]*)('''|\"\"\"|'|\")", t.string)
        prefix, quote = m.groups()
        if len(quote) == 3 or "b" in prefix.lower() and False: continue
        body = t.string[len(prefix) + len(quote):-len(quote)]
        points = split_points(prefix, body, "r" in prefix.lower())
        # room: assume the pieces end up on lines of their own, at indent + 4 (or + 8)
        indent = len(line) - len(line.lstrip())
        alone = line.strip().rstrip(",") == t.string or line.strip().rstrip("),") == t.string
        if len(line) <= WIDTH: continue
        room = WIDTH - (indent if alone else indent + 8) - len(prefix) - 2 * len(quote) - 1
        points = [p for p in points if 12 <= p <= len(body) - 6]
        fit = [p for p in points if p <= room]
        if not fit: continue
        # if all fits in a piece of its own line, cut where the line overflows
        col = t.start[1] + len(prefix) + len(quote)
        at = max(fit)
        if len(body) <= room:
            inline = [p for p in points if col + p <= WIDTH - 2]
            at = max(inline) if inline else max(fit)
        a, b = piece(prefix, quote, body[:at]), piece(prefix, quote, body[at:])
        prev, nxt = sig[k - 1], sig[k + 1] if k + 1 < len(sig) else None
        chain = prev.type == tokenize.STRING or (nxt is not None and nxt.type == tokenize.STRING)
        top = stack[-1] if stack else ""
        bare = (top == "call" or top == "(") and prev.string in "(," and nxt is not None and nxt.string in "),"
        new = f"{a} {b}" if chain or (bare and top == "call") or (top == "(" and prev.string == "(" and nxt.string == ")") else f"({a} {b})"
        edits.append((t.start, t.end, new)); done.add(t.start[0])
    for s, e, new in sorted(edits, reverse=True):
        l = lines[s[0] - 1]
        lines[s[0] - 1] = l[:s[1]] + new + l[e[1]:]
    return "\n".join(lines), bool(edits)

# ---------------------------------------------------------------- driver
def normalized(text):
    tree = ast.parse(text)
    for d in docstring_nodes(tree): d.value = " ".join(d.value.split())
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr): pass
    return ast.dump(tree)

def ruff(paths):
    for i in range(0, len(paths), 100):
        subprocess.run([RUFF, "format", "-q", "--config", f"line-length={WIDTH}", *map(str, paths[i:i+100])], check=True)

def main():
    global RUFF
    RUFF = sys.argv[1]
    paths = [Path(p) for p in sys.argv[2:]]
    total = 0
    for p in paths:
        t = p.read_text()
        t = re.sub(r"  # fmt: skip$", "", t, flags=re.M)
        while True:
            new, count = unpack(t, p)
            ast.parse(new)
            total += count
            t = new
            if not count: break
        p.write_text(t)
    print("unpacked", total)
    seen = set(SKIPPED)
    ruff(paths)
    for round in range(6):
        changed = 0
        for p in paths:
            t = p.read_text()
            if not any(len(l) > WIDTH for l in t.split("\n")): continue
            before = normalized(t)
            u = comments_pass(t, p)
            u = docstrings_pass(u, p)
            u, _ = strings_pass(u, p)
            try: ok = normalized(u) == before
            except SyntaxError as e: ok = False
            if not ok:
                print("CHANGED MEANING", p); Path(str(p) + ".bad").write_text(u); continue
            if u != t: p.write_text(u); changed += 1
        ruff(paths)
        print("round", round, "changed", changed)
        if not changed: break
    wide = 0
    for p in paths:
        for i, l in enumerate(p.read_text().split("\n"), 1):
            if len(l) > WIDTH: wide += 1; print(f"WIDE {p}:{i}: {l.strip()[:90]}")
    print("wide", wide)
    for s in dict.fromkeys(SKIPPED): print("SKIP", *s)
main()
