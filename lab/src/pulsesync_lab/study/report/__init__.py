"""The report of a recording: numbers, tables and rows, and a page with plots."""
