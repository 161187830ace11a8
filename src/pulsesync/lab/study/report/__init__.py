"""What a recording says: in numbers, as tables and rows, and as a page with plots."""
