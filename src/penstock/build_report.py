"""Says, after a build, whether the kernel is compiled: `python -m penstock.build_report`."""

import penstock

if __name__ == "__main__":
    if penstock.compiled():
        print("== set-up: done, kernel compiled")
    else:
        print(
            "== set-up: done, but the kernel is NOT compiled (no C compiler?): everything works, "
            "many times slower; the compiler's words are in .venv/build.log"
        )
