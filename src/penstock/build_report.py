"""Reports after a build whether the core is compiled: `python -m penstock.build_report`."""

import penstock

if __name__ == "__main__":
    if penstock.compiled():
        print("== set-up: done, core compiled")
    else:
        print(
            "== set-up: done, but the core is NOT compiled (no C compiler?). Everything works, but "
            "many times slower. The compiler's output is in .venv/build.log."
        )
