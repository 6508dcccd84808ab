"""Plans to look at: one page of HTML, and drawings for the terminal.

In: a stored deployment, what its steps took, and maybe another deployment. Out: bytes of a page that needs no network
(`html_page.py`; its form is `page.html`, `page.css` and `page.js`), and text. Without torch. Begin with `page_data.py`.
"""
