"""What a run leaves behind, and its readers: one event file, shown as a table, a page, JUnit or a badge."""
