"""A repository made of files that a package of the operating system has installed."""

def _system_repository_impl(ctx):
    machine = ctx.execute(["uname", "-m"])
    triplet = machine.stdout.strip() + "-linux-gnu"  # Debian's name of the folder for this machine's libraries
    for target, link in ctx.attr.links.items():
        target = target.replace("{triplet}", triplet)
        if not ctx.path(target).exists:
            fail("[@%s] expected %s, got nothing there. `apt-get install %s` brings it, and so does ./bazelw" %
                 (ctx.name, target, ctx.attr.package))
        ctx.symlink(target, link)
    for template, path in ctx.attr.files.items():
        ctx.template(path, template, {"{triplet}": triplet}, executable = False)

system_repository = repository_rule(
    implementation = _system_repository_impl,
    attrs = {
        "package": attr.string(doc = "The Debian package, for the error message."),
        "links": attr.string_dict(doc = "Path on this machine -> path in the repository. {triplet} stands for x86_64-linux-gnu."),
        "files": attr.label_keyed_string_dict(doc = "File of this repository -> path in that one. {triplet} is replaced there too."),
    },
    local = True,
)
