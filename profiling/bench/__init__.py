"""The benchmark harness: named cases, one line per run, statistics on reading, reports and publishing."""
