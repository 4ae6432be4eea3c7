"""The reports' pages: templates/*.html, each on templates/base.html."""

import jinja2


def render(template: str, **values: object) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("detlogp.evidence"), autoescape=True, trim_blocks=True
    )
    return environment.get_template(template).render(**values)
