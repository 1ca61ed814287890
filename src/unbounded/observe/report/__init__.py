"""A run as a page: charts and lanes as SVG in one HTML file that needs nothing else, served live, or in a notebook.

Everything is drawn here and not in the browser: titles of elements are the tooltips, so the page works without a
script, and a test can read what is drawn. Nothing depends on colour alone: each lane has its own row, and
backward passes and budgets have patterns and labels.
"""
