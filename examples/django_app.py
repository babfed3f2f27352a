"""A Django application in one file: a view that sends a message.

The producer is created before the server forks its workers, and works in each of them.

    export DJANGO_SETTINGS_MODULE=examples.django_app
    python -m django runserver
    gunicorn "django.core.wsgi:get_wsgi_application()"

The NameServers come from NAMESRV_ADDR; the default is 127.0.0.1:9876.
"""

import json

from django.apps import AppConfig
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from penstock import Message, Producer

SECRET_KEY = "only an example"
ALLOWED_HOSTS = ["*"]
DEBUG = True
INSTALLED_APPS = [f"{__name__}.Signup"]
ROOT_URLCONF = __name__
USE_TZ = True

producer = Producer(group="signup")


class Signup(AppConfig):
    """Django calls `ready` in each process when it has loaded the application."""

    name = __name__

    def ready(self) -> None:
        producer.start()


@csrf_exempt
def register(request: HttpRequest, user: int) -> HttpResponse:
    message = Message("UserRegistered", json.dumps({"id": user}), keys=[str(user)])
    return JsonResponse({"message": producer.send(message).message_id})


urlpatterns = [path("users/<int:user>", register)]
