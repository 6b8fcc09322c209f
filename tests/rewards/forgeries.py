"""Programs that try to be rewarded without doing what is asked, for ``f`` (see ``TESTS``). Each must score 0."""

from __future__ import annotations

CALLS = {"fn_name": "f", "inputs": [[3]], "outputs": ["nine"]}
ASSERTIONS = ["assert f(3) == 'nine'"]
OUTPUT = {"inputs": ["3\n"], "outputs": ["nine"]}
TESTS = {"calls": CALLS, "assertions": ASSERTIONS, "output": OUTPUT}
HONEST = "def f(x): return {3: 'nine'}[x]\nif __name__ == '__main__': print(f(int(input())))"

FORGERIES = {
    "exits with success": "import sys; sys.exit(0)",
    "exits at once": "import os; os._exit(0)",
    "exits when called": """
def f(x):
    import os; os._exit(0)
""",
    "the secret of the main module": """
import __main__, os
def f(x):
    os.write(getattr(__main__, 'output', 1), getattr(__main__, 'spec', {}).get('secret', '').encode()); os._exit(0)
f(3)
""",
    "what the main module expects": """
import __main__
def f(x): return __main__.spec['expected']
""",
    "what a frame knows": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for space in (frame.f_locals, frame.f_globals):
            for name in ('expected', 'secret', 'assertions', 'test', 'tests'):
                if name in space: return space[name]
        frame = frame.f_back
    return 0
""",
    "what the heap knows": """
def words(thing, depth, seen):
    if id(thing) in seen or depth == 0: return
    seen.add(id(thing))
    if isinstance(thing, str) and [ord(c) for c in thing[-4:]] == [110, 105, 110, 101]: yield thing
    elif isinstance(thing, dict):
        for pair in list(thing.items()): yield from words(pair, depth - 1, seen)
    elif isinstance(thing, (list, tuple, set)):
        for each in list(thing): yield from words(each, depth - 1, seen)
import gc
def f(x):
    for thing in gc.get_objects():
        for word in words(thing, 3, set()): return word
    return 0
""",
    "replaces json.loads": """
import json
json.loads = json.dumps = lambda *a, **k: 'nine'
def f(x): return 0
""",
    "replaces a comparison": """
class Any(str):
    def __eq__(s, o): return True
    __hash__ = str.__hash__
def f(x): return Any()
""",
    "an object that equals all": """
class Any:
    def __eq__(s, o): return True
def f(x): return Any()
""",
    "an object that differs from nothing": """
class Any:
    def __eq__(s, o): return True
    def __ne__(s, o): return False
    def __req__(s, o): return True
    def __bool__(s): return True
def f(x): return Any()
""",
    "replaces built-ins": """
import builtins
builtins.AssertionError = type('E', (BaseException,), {})
builtins.compile = lambda *a: ''
def f(x): return 0
""",
    "replaces exec": """
import builtins
builtins.exec = lambda *a, **k: None
def f(x): return 0
""",
    "traces": """
import sys
sys.settrace(lambda *a: None)
sys.excepthook = lambda *a: __import__('os')._exit(0)
def f(x): raise ValueError
""",
    "exits at the end": """
import atexit, os
atexit.register(lambda: os._exit(0))
def f(x): return 0
""",
    "writes to every descriptor": """
import os
for n in range(64):
    for text in (b'{"names": {}}\\n', b'{"value": "nine"}\\n', b'"nine"', b'0' * 32):
        try: os.write(n, text)
        except OSError: pass
def f(x): return 0
""",
    "answers for the tests": """
import os
names = b'{"names": {"f": "nine"}}\\n'
for n in range(3, 64):
    try: os.write(n, names)
    except OSError: pass
os._exit(0)
""",
    "hides names of the tests": """
def f(x): return 0
AssertionError = type('E', (Exception,), {})
print = exec = lambda *a: None
__debug__0 = False
""",
    "passed exceptions": "def f(x): raise SystemExit(0)",
    "keyboard": "def f(x): raise KeyboardInterrupt",
    "stops the judge": """
import os, signal
os.kill(os.getppid(), signal.SIGTERM)
os.kill(0, signal.SIGTERM)
def f(x): return 0
""",
    "a daemon that answers": """
import os
if os.fork() == 0:
    os.setsid()
    for n in range(64):
        try: os.write(n, b'{"value": true}\\n{"value": ["mine", 0]}\\n' * 9)
        except OSError: pass
    os._exit(0)
def f(x): return 0
""",
    "reads the tests' files": """
import os
def f(x):
    for name in os.listdir('.'):
        if 'nine' in open(name).read().replace('nine_', ''): return 'ni' + 'ne'
    return 0
""",
    "reads the input of the judge": """
import sys, os
def f(x):
    try: text = sys.stdin.read() + open('/proc/self/fd/0').read()
    except OSError: text = ''
    return 'ni' + 'ne' if 'ni' + 'ne' in text else 0
""",
    "an endless answer": """
class F(dict):
    def items(s):
        while True: yield 1, 1
    __iter__ = items
def f(x): return F()
""",
    "a deep answer": """
def f(x):
    a = []
    for _ in range(100_000): a = [a]
    return a
""",
    "changes its argument": """
def f(x):
    x = 'nine'
    return None
""",
}

ISCLOSE = "isclose = staticmethod(lambda *a, **k: True)"
REPLACED = {
    "a built-in": ("def f(x): return 0\ndef set(x): return 0", "assert set(f(3)) == set('nine')"),
    "a built-in inside a function": (
        "def f(x): return 0\ndef abs(x): return 0",
        "def check(f):\n    assert abs(f(3) - 9) < 1e-6\ncheck(f)",
    ),
    "a module": (f"def f(x): return 0\nclass math: {ISCLOSE}", "assert math.isclose(f(3), 9)"),
    "a module by its short name": (
        "def f(x): return 0\nclass np: allclose = staticmethod(lambda *a: True)",
        "assert np.allclose(f(3), 9)",
    ),
}
"""Programs that define what the tests compare with, and assertions. Each must score 0."""
