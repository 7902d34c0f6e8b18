"""Spark's daemon of Python workers, whose tasks note what their steps take."""

import runpy

import epoch_steps

if __name__ == "__main__":
    epoch_steps.note_tasks()
    runpy.run_module("pyspark.daemon", run_name="__main__")
