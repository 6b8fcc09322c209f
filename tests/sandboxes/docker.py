"""Stands in for docker's command line: a "container" is a folder, and what it runs are processes of this machine.

    python docker.py FOLDER run|exec|ps|rm ...

Every command line is appended to ``FOLDER/log``.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

folder, what, *rest = Path(sys.argv[1]), *sys.argv[2:]
with (folder / "log").open("a") as log:
    log.write(json.dumps([what, *rest]) + "\n")
if what == "run":
    name = uuid.uuid4().hex[:12]
    (folder / name).mkdir()
    owner = next(each for each in rest if each.startswith("asyncrl.owner=")).partition("=")[2]
    (folder / f"{name}.owner").write_text(owner)
    print(name)
elif what == "ps":
    for each in folder.glob("*.owner"):
        print(each.stem, each.read_text())
elif what == "rm":
    shutil.rmtree(folder / rest[-1])
    (folder / f"{rest[-1]}.owner").unlink()
elif what == "inspect":
    if not (folder / rest[-1]).is_dir():
        sys.exit(f"no such container: {rest[-1]}")
    print("true")
elif what == "exec":
    given = list(rest)
    env = {"PATH": os.defpath}
    while given[0].startswith("--"):
        if given.pop(0) == "--env":
            env.update([given.pop(0).split("=", 1)])
    name = given.pop(0)
    if not (folder / name).is_dir():
        sys.exit(f"no such container: {name}")
    running = folder / f"{name}.pid"
    if "kill -9 -1" in given[-1]:
        if (folder / name / "no-room").exists():
            sys.exit("resource temporarily unavailable")
        if running.exists():
            subprocess.run(["kill", "-9", running.read_text()], check=False, stderr=subprocess.DEVNULL)
            running.unlink()
        sys.exit(0)
    try:
        program = subprocess.Popen(given, cwd=folder / name, env=env)
        running.write_text(str(program.pid))
        code = program.wait()
    except FileNotFoundError as error:
        sys.exit(f"{error}")
    sys.exit(128 - code if code < 0 else code)
